"""What a run leaves behind: its log, and folders that diffusers opens."""
