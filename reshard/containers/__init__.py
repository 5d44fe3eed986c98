"""The inside of files: bytes to stored arrays, no names of tensors, no framework."""
