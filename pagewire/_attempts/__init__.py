"""The attempts of a generating call: when it is sent again, and with which request. No IO."""
