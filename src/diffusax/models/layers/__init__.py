"""The layers and blocks that the networks share."""
