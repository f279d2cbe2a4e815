"""Images: reading, resizing, masks, sheets, and what a pipeline gives back."""
