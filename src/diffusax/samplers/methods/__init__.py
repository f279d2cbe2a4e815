"""Solvers: the step formulas of the papers, as rows of coefficients."""
