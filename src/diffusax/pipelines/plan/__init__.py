"""The data of one run, and the arguments of the call that it is made from.

Begin with `plan`. `arguments` declares and checks what calls take, `guidance` and `branches` say
how predictions under several conditions become one.
"""
