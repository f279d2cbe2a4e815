"""Compiled programs: made, kept, saved, exported and measured."""
