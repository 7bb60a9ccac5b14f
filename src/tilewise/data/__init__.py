"""Data to train on: samples by index, from shards, tables and folders, checked at the door."""
