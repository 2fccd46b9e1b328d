"""Chats whose answers outlive pages and processes.

The stream `chats/{chat}` has the messages, in order. `chats/{chat}/answers/{question}` has the chunks
of one answer, as the AI SDK defines them, and is closed when it ends. There is no other state.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from model import ModelError, answer
from streams import Producer, Streams, SupersededError, patiently

log = logging.getLogger(__name__)
Message = dict[str, Any]


@dataclass
class Conversation:
    """What the stream of a chat adds up to."""

    messages: list[Message] = field(default_factory=list)
    stopped: set[str] = field(default_factory=set)

    @property
    def open_question(self) -> str | None:
        """The last message, unless it has an answer."""
        last = self.messages[-1] if self.messages else {"role": ""}
        return last["id"] if last["role"] == "user" else None


def fold(entries: list[Any]) -> Conversation:
    """Entries that another program may have appended are skipped."""
    conversation = Conversation()
    for entry in entries:
        match entry:
            case {"message": {"id": str(), "role": "user" | "assistant", "parts": [*_]} as message}:
                conversation.messages.append(message)
            case {"stop": str() as question}:
                conversation.stopped.add(question)
    return conversation


def text_of(chunks: list[Any]) -> str:
    """The text that the chunks of an answer add up to."""
    text = ""
    for chunk in chunks:
        match chunk:
            case {"type": "text-delta", "delta": str() as delta}:
                text += delta
    return text


class Chats:
    """Takes questions, and works on their answers in the background."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self._workers: dict[str, Worker] = {}

    async def conversation(self, chat: str) -> Conversation:
        entries, _ = await self.streams.read(f"chats/{chat}")
        return fold(entries)

    async def ask(self, chat: str, message: Message) -> None:
        """Store a question, once even if it comes again, and have it answered."""
        await self.streams.create(f"chats/{chat}")
        await self.streams.create(f"chats/{chat}/answers/{message['id']}")
        producer = Producer(f"question-{message['id']}")
        await self.streams.append(f"chats/{chat}", {"message": message}, producer)
        await self.resume(chat)

    async def resume(self, chat: str) -> None:
        """Work on the open question, unless this process does; another process is shut out."""
        conversation = await self.conversation(chat)
        question = conversation.open_question
        if question and question not in self._workers:
            worker = Worker(self.streams, chat, question, conversation)
            self._workers[question] = worker
            worker.task.add_done_callback(lambda _: self._workers.pop(question))

    async def stop(self, chat: str) -> None:
        """End the answer under way, for every page that reads it."""
        question = (await self.conversation(chat)).open_question
        if question:
            producer = Producer(f"stop-{question}")
            await self.streams.append(f"chats/{chat}", {"stop": question}, producer)
            await self.resume(chat)
            if question in self._workers:
                self._workers[question].stopped.set()


class Worker:
    """Writes one answer, from where an earlier worker has left it."""

    def __init__(
        self, streams: Streams, chat: str, question: str, conversation: Conversation
    ) -> None:
        self.streams, self.question = streams, question
        self.chat, self.path = f"chats/{chat}", f"chats/{chat}/answers/{question}"
        self.messages = conversation.messages
        self.stopped = asyncio.Event()
        if question in conversation.stopped:
            self.stopped.set()
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            await self._work()
        except SupersededError:
            log.info("another worker writes the answer to %s", self.question)
        except Exception:
            log.exception("the answer to %s stays open until a page asks for it", self.question)

    async def _work(self) -> None:
        text = await self._write()
        parts = [{"type": "text", "text": text}]
        message = {"id": f"{self.question}-answer", "role": "assistant", "parts": parts}
        producer = Producer(f"answer-{self.question}")
        await patiently(lambda: self.streams.append(self.chat, {"message": message}, producer))

    async def _write(self) -> str:
        """Write what is missing of the answer; returns its text."""
        # The position of this entry is a number that no other worker gets, and later ones are higher.
        claim = {"worker": self.question}
        epoch = await patiently(lambda: self.streams.append(self.chat, claim))
        producer = Producer("worker", epoch)

        async def put(*chunks: dict[str, Any], close: bool = False) -> None:
            await patiently(
                lambda: self.streams.append(self.path, list(chunks), producer, close=close)
            )

        # Behind this chunk, earlier workers cannot write: what is read next is all that they wrote.
        # It is refused if the stream is closed, or if a later worker is there, as is the next chunk.
        with suppress(SupersededError):
            await put({"type": "data-worker", "data": epoch, "transient": True})
        chunks, closed = await patiently(lambda: self.streams.read(self.path))
        text = text_of(chunks)
        if closed:
            return text
        if not any(isinstance(chunk, dict) and chunk.get("type") == "start" for chunk in chunks):
            await put(
                {"type": "start", "messageId": f"{self.question}-answer"},
                {"type": "text-start", "id": "text"},
            )
        end = {"type": "finish"}
        try:
            async for delta in until(self.stopped, answer(self.messages, text)):
                await put({"type": "text-delta", "id": "text", "delta": delta})
                text += delta
        except ModelError as error:
            end = {"type": "error", "errorText": str(error)}
        if self.stopped.is_set():
            end = {"type": "abort"}
        await put({"type": "text-end", "id": "text"}, end, close=True)
        return text


async def until(event: asyncio.Event, source: AsyncIterator[str]) -> AsyncIterator[str]:
    """What a source yields until an event is set."""
    stop = asyncio.ensure_future(event.wait())
    try:
        while not event.is_set():
            item = asyncio.ensure_future(anext(source, None))
            await asyncio.wait({stop, item}, return_when=asyncio.FIRST_COMPLETED)
            if not item.done():
                item.cancel()
                return
            value = item.result()
            if value is None:
                return
            yield value
    finally:
        stop.cancel()
