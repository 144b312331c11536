"""The recurrence of gated delta nets, and the convolution and norm around it."""
