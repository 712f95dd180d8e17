"""Stores on other machines, behind one small interface."""
