// Browsers start no web worker from a file: run the script of the search in a hidden frame, so that search works from a disk.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.body.appendChild(document.createElement("iframe"))
      frame.hidden = true
      this.scope = frame.contentWindow
      this.scope.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.scope.importScripts = (...urls) => Promise.all(urls.map(each => this.load(each)))
      this.loaded = this.load(url)
    }

    load(url) {
      return new Promise((resolve, reject) => {
        const script = this.scope.document.createElement("script")
        Object.assign(script, { src: url, onload: resolve, onerror: reject })
        this.scope.document.body.append(script)
      })
    }

    postMessage(data) {
      this.loaded.then(() => this.scope.dispatchEvent(new this.scope.MessageEvent("message", { data })))
    }

    terminate() {
      this.scope.frameElement.remove()
    }
  }
}
