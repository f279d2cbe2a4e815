"""UNets, and the networks that steer them: ControlNets and T2I-Adapters."""
