"""One step, from the gradients that arrive in backward to what is logged after it; the base of the optimizers."""
