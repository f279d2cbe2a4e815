"""What programs run on: devices as a mesh, random numbers, compilation."""
