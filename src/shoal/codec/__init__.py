"""Forms in which tensors travel."""

from shoal.codec.compressor import Compressor as Compressor
