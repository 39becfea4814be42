"""The embedded server: OpenAI's interface to one model, on Starlette and uvicorn."""
