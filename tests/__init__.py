"""Tests of actmem; `tests.zoo` holds the small models that several of them share."""
