"""Sampling on the device: slot state, Gumbel-max sampling, filtered draws."""
