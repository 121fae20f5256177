"""Xet storage of the embedded Hub: chunks in xorbs, files as lists of chunk ranges."""
