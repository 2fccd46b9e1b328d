// The page of a chat. Its name is in the URL, after the #.
import { useEffect, useState } from "react";
import { createRoot } from "react-dom/client";
import { Chat, useChat } from "@ai-sdk/react";
import { createDurableChatTransport } from "@durable-streams/aisdk-transport";

const api = "/api/chat";
const textOf = (message) =>
  message.parts.map((part) => (part.type === "text" ? part.text : "")).join("");

function openChat(id, history) {
  const question = () => chat.messages.findLast((message) => message.role === "user");
  const transport = {
    sendMessages: createDurableChatTransport({ api }).sendMessages,
    reconnectToStream(options) {
      const reconnectApi = `${api}/${id}/answers/${question().id}`;
      return createDurableChatTransport({ api, reconnectApi }).reconnectToStream(options);
    },
    resumeStreamIsReplay: true, // an answer is read from its first chunk again
  };
  const chat = new Chat({ id, messages: history, transport });
  return chat;
}

function Page({ chat }) {
  // The answer to the last question is under way, or has just ended.
  const resume = chat.lastMessage?.role === "user";
  const { messages, sendMessage, resumeStream, status, error } = useChat({ chat, resume });
  const [text, setText] = useState("");
  const busy = status === "submitted" || status === "streaming";
  const disconnected = error instanceof TypeError; // what a browser throws without a network

  useEffect(() => {
    if (disconnected) {
      const timer = setTimeout(resumeStream, 500);
      return () => clearTimeout(timer);
    }
  }, [error]);

  function submit(event) {
    event.preventDefault();
    sendMessage({ text });
    setText("");
  }

  const askAgain = () =>
    sendMessage({ text: textOf(messages.findLast((message) => message.role === "user")) });

  // The answer ends for every page that reads it. useChat's own stop() would only stop this page reading.
  const stop = () => fetch(`${api}/${chat.id}/stop`, { method: "POST" });

  return (
    <>
      <ul>
        {messages.map((message) => (
          <li key={message.id} className={message.role}>{textOf(message)}</li>
        ))}
      </ul>
      {error && !disconnected && (
        <p role="alert">{error.message} <button onClick={askAgain}>Ask again</button></p>
      )}
      <form onSubmit={submit}>
        <input value={text} onChange={(event) => setText(event.target.value)} placeholder="Ask" />
        {busy ? <button type="button" onClick={stop}>Stop</button> : <button>Send</button>}
      </form>
      <p role="status">{disconnected ? "reconnecting" : status}</p>
    </>
  );
}

location.hash ||= crypto.randomUUID();
const id = location.hash.slice(1);
const response = await fetch(`${api}/${id}`);
createRoot(document.getElementById("chat")).render(
  response.ok
    ? <Page chat={openChat(id, await response.json())} />
    : <p role="alert">{await response.text()}</p>,
);
