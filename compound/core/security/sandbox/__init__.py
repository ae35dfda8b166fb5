"""Run generated code in an isolated process without network access and with bounded resources."""
