"""UNets, and the networks that steer them: ControlNets and T2I-Adapters.

Begin with `unet`. ControlNets share its way down, which is in `unet_encoder`.
"""
