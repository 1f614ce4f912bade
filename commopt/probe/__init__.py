"""``commopt probe``: does compression pay on these machines, for this model?

    options      what the user says, and the mistakes in it
    measure      collectives by message size, and what computing loses while one is in flight
    local        what the optimizers cost on the device, without a network
    means        what compressed means of gradients cost there
    fit          times -> latency and bandwidth
    compressors  those of gradients that are compared, and how much they lose
    machines     what means cost with machines as nodes: measured, predicted
    cut          what FSDP2 over all ranks costs, as it is and compressed: measured, predicted, recommended
    messages     what they send, in closed form
    clock        a device and a link, in simulated time
    model        what is trained: what it computes in a step, and what it is cut into
    sgd          steps of CSER and QSparseLocalSGD
    rounds       what rounds of local steps cost
    predict      latency, bandwidth and costs -> seconds per step, break-even
    advice       predictions -> one recommendation
    figures      numbers as people write them
    report       all of it as text and as JSON
    command      the ranks meet, agree, measure; rank 0 reports

``fit``, ``messages``, ``predict`` and ``advice`` are pure functions on numbers.
"""
