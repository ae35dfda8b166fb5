"""Engine for servers with the API of OpenAI."""
