"""Fault-injection harness: faulty model servers, kills, damaged files and full disks."""
