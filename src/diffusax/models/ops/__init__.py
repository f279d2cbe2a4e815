"""Operations in the form that is fastest for the platform: convolutions, products, attention.

Blocks of networks call them by plain names and do not know the platform.
"""
