"""``commopt probe``: does compression pay on these machines, for this model?

    options    what the user says, and the mistakes in it
    measure    collectives by message size, and what computing loses while one is in flight
    local      what the optimizers cost on the device, without a network
    fit        times -> latency and bandwidth
    predict    latency, bandwidth and costs -> seconds per step, break-even, advice
    report     all of it as text and as JSON
    command    the ranks meet, agree, measure; rank 0 reports

``fit`` and ``predict`` are pure functions on numbers.
"""
