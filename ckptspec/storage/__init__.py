"""Bytes in and out of disks."""
