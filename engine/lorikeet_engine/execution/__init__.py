"""Running a step: memory and warm-up at start, batches, the forward pass, CUDA graphs."""
