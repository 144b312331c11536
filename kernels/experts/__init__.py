"""Mixture of experts: which experts a row has, and the products with their weights."""
