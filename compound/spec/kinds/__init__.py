"""The component kinds of the YAML file: each module holds the schema, construction and spelling of one."""
