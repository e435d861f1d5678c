"""Search of a space of DLRM training designs."""
