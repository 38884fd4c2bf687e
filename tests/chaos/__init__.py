"""A night on a bad farm: twelve virtual boards, ten with a different fault each. `make chaos`."""
