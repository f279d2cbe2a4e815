"""The layers and blocks that several networks share.

Begin with `layers`: linear layers, convolutions and norms with layout and accumulation fixed.
"""
