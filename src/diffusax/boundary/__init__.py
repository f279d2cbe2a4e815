"""What comes from outside: typed values, tensors, files, and sentences about mistakes.

Values become what their declared types say (`convert`, `config`, `options`), PyTorch's tensors
become arrays and back (`tensors`), files are read with bounds and written whole (`files`).
"""
