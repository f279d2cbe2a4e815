"""The API of A1111's server (stable-diffusion-webui)."""
