"""Compiled programs: made, kept, saved, exported and measured.

Begin with `program`. `cache` keeps executables between processes, `saved` and `exporting` write
them to files, `topology` compiles for devices elsewhere, and `cost` says what programs take.
"""
