"""What tests share: tiny checkpoints, references in PyTorch, servers, files and data sets."""
