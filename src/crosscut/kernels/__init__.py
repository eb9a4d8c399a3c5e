"""GPU code for one NVLink host: a workspace that all ranks of a group share, and the collectives that live in it."""
