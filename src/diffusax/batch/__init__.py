"""The running batch: images of many calls in one program, which join and leave at any step."""
