"""Fuzzers that send broken, hostile and odd requests to every port, and judge the answers."""
