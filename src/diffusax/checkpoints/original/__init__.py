"""The names that tensors have in the single files of Stability AI's and CompVis' original code."""
