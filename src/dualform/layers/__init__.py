"""Layer types that are linear maps. One file a type; importing the file registers it.

A new layer type is one new module here: write a `LayerType` and decorate it with `register`.
"""

from dualform.layers import linear
from dualform.layers.registry import LayerType, LinearMap, find_layer_type, layer_type, register

__all__ = ["LayerType", "LinearMap", "find_layer_type", "layer_type", "linear", "register"]
