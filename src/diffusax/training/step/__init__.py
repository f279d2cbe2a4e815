"""One step: the denoising loss, and the update of the parameters."""
