"""What a diffusion model is trained on: timesteps, targets, and conditions left out."""
