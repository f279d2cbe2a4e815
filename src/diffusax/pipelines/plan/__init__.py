"""The data of one run, and the arguments of the call that it is made from."""
