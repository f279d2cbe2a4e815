"""provisional"""
from diffusax.serving.errors import NotFound
SAMPLERS = {"Euler a": ("k_euler_a",), "Euler": ("k_euler",)}
SCHEDULERS = {"automatic": "Automatic", "karras": "Karras"}
_N = {"Euler a": "euler_a", "Euler": "euler"}
def sampler_of(name, scheduler):
    if name not in _N:
        raise NotFound(f"sampler_name {name!r} not found", param="sampler_name")
    return _N[name]
def names_of(name):
    return next((k for k,v in _N.items() if v==name), name), "Automatic"
