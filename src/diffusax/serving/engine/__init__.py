"""The thread that owns the device, and the jobs that share its batches."""
