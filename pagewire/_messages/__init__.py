"""Protobuf at one edge of the SDK: values to requests, and responses to values."""
