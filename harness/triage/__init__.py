"""Why an engine ended badly: evidence is parsed, classed in a fixed order, and given a signature.

`case.py` gathers what one run left, `classes/` has a module for each class of crash, `deciding.py`
asks them in their order, `signature.py` names what is the same crash elsewhere.
"""
