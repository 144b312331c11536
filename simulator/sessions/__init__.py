"""Sessions of agents in virtual time: how much a cache policy computes, how little it must."""
