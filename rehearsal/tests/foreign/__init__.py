"""Rehearsals of scripts that use other libraries."""
