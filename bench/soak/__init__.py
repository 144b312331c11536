"""The product under load, cancels and kills; at its end every answer is compared with its twin."""
