"""LangChain's OpenAI client pointed at levserve: a prompt template, whole, streamed, batched and structured answers.

pip install langchain-openai; OPENAI_BASE_URL and OPENAI_API_KEY say where the server is and which key it wants.
"""

import os

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

model = ChatOpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "any"),
    model="smollm2-135m",
    temperature=0,
    max_tokens=32,
)
prompt = ChatPromptTemplate.from_messages([("system", "Answer in one sentence."), ("user", "{question}")])
chain = prompt | model | StrOutputParser()

print(chain.invoke({"question": "What is the capital of France?"}))
for text in chain.stream({"question": "Name three colours."}):
    print(text, end="", flush=True)
print()
for answer in chain.batch([{"question": f"What is {number} plus 1?"} for number in (1, 2)]):
    print(answer)


class Author(BaseModel):
    name: str = Field(max_length=20)
    born: int = Field(ge=1, le=2100)


author = model.with_structured_output(Author, method="json_schema")
print(repr(author.invoke("Who wrote Faust? Answer with name and year of birth as JSON.")))
