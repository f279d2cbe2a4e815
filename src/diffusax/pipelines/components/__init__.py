"""What a pipeline is made of: networks with parameters, adapters, and their loading."""
